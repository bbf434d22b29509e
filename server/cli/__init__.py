"""The `outrider` command."""
