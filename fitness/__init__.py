"""build → inspect → gate → time: the judge of candidates. Never knows who proposed one."""
