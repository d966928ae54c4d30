"""Raw text to training shards: read, filter, score, remove duplicates, label, write."""
