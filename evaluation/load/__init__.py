"""Serving load: what a deployment does under many requests at once, closed or open loop, streamed or not.

``workload`` draws requests and arrival times, ``wire`` sends bytes and stamps answers, ``drive`` keeps the load up,
``figures`` declares every figure with its unit and formula, ``sweep`` goes through the points and writes the files.
"""
