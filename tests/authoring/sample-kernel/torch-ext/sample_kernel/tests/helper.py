raise AssertionError("the tests of a package do not travel")
