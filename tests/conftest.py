"""Its place puts tests/ on the import path, so that tests share ``synthetic``."""
