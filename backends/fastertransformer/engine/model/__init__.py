"""From config.ini and shards to weights in memory."""
