"""What other libraries gain from this one; each module loads its library when it is called."""
