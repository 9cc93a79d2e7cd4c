"""Learning from what answers are worth. Users' files import `environment` from here, in processes
without torch: so this file imports nothing."""
