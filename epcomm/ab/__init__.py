"""``python -m epcomm ab``: two control paths, everything else equal, and which differences are real.

Both sides live in the same processes and take turns: each repeat asks every measurement of A and of B, in an order
that changes from repeat to repeat. `ranks` measures on a rank, `run` takes the turns, `stats` says what the numbers
allow to say, `report` and `plot` show it, `cli` reads the command line.
"""
