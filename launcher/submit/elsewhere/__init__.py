"""Jobs for other launchers: a file a job and launcher, as ``plans=export`` writes them."""
