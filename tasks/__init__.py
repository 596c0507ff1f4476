"""rackwright: from a bare or rented GPU host to a proven OpenAI-compatible endpoint."""

__version__ = "0.1.0"
