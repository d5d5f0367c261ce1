def add(left: int, right: int) -> int:
    return left + right
