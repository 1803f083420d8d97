"""Training state on disk, without Hugging Face: checkpoint folders, optimizer states and resume points."""
