"""Search among images: revisited Oxford and Paris, folders with labels, copy detection."""
