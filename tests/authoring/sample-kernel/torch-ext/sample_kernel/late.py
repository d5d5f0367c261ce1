WORD = "verified"
