"""What the data says, in sentences, one file per subject."""
