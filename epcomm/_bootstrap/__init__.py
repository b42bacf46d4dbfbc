"""Parts of :mod:`epcomm.bootstrap`: how ranks meet and exchange bytes before any backend exists."""
