"""What a profile is measured with: one file per thing measured."""
