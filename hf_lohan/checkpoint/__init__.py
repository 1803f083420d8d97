"""Training state on disk, without Hugging Face: complete folders, optimizer states and resume points."""
