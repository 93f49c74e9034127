"""AdamW's moments in host memory, or in fewer bits: the optimizer, formats, places, copies."""
