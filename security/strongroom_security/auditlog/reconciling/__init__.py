"""What storage and key services say was done, held against what the audit log says.

`accesslogs` and `cloudtrail` read what AWS delivers, `sources` finds it; `operations` draws our events
together, `joining` holds one against the other by what `accounting` lets them do, and `commits` holds a
root's commits against them.
"""
