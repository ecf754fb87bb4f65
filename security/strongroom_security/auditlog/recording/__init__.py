"""What a process puts on record, and how that comes to the sink: the auditor that fills the core's seam."""
