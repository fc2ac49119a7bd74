"""Which package does an integration need, and what is said where it is missing?"""

from autopar.errors import MissingPackageError


def missing(package: str, error: ImportError) -> MissingPackageError:
    """What to raise where a framework cannot be imported.

    Args:
        package: its name as `pip install` takes it.
        error: what the import raised.
    """
    return MissingPackageError(
        f"autopar.integrations needs the package {package}, and importing it failed ({error}); "
        f"install it: pip install {package}"
    )
