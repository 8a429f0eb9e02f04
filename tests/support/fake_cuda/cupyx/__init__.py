"""What the package calls of `cupyx`, on the stand-in for CuPy."""
