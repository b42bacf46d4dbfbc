"""What several tests share. Import as ``from helpers import oracle``; ``conftest.py`` puts the folder on the path."""
