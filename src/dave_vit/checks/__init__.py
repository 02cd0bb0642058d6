"""What a user can check of a model: doctor and the table of architectures."""
