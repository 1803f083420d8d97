"""Sums of gradients over all ranks in rank order, and codecs for slow links."""
