raise AssertionError("the tests of a kernel do not travel")
