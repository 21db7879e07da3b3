"""What a terminal shows: the bar of a run, the tables of a study."""
