"""What benchmarks share: timing, tables, model shapes, and ranks on this machine or behind slow links."""
