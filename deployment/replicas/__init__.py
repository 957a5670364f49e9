"""Several servers of one model behind a router: started, watched, replaced, restarted one after another."""
