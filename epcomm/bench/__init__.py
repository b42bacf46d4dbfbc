"""``python -m epcomm bench``: what layout, dispatch and combine cost here, against what the memory could do.

Everything is measured in one run, in turns: each trial asks every case once, so that a slow moment of the machine
meets them all. `workload` makes the data, `cases` and `baselines` are what is measured, `ranks` runs them on a rank,
`run` takes the turns, `report` and `plot` show the numbers, `cli` reads the command line.
"""
