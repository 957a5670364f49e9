"""The life of a deployment, whatever serves: started, proved, watched, ended, with nothing left of it."""
