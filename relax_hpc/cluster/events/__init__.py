"""Events of a run for people: conditions, their hysteresis, a log, and the command of the site"""
