"""What the package calls of `cupyx`, on the stand-in for CuPy."""

from cupy._linalg import errstate  # noqa: F401
