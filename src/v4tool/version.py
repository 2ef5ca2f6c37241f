"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("v4tool")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+source"
