"""The version of kvik, for modules that `import kvik` reaches itself."""

__version__ = "0.1.0"
