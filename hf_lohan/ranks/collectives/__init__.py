"""Gradients summed over all ranks in rank order, and the codecs for slow links."""
