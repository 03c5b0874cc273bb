"""One batch on several ranks: items or rows shared out, and which of the two is faster."""
