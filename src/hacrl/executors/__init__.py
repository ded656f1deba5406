"""Where agents' workers live: in this process (``local``), or wherever another executor places them."""
