"""`paceline launch --hosts a,b:2`: ranks on a few machines that have nothing but OpenSSH.

The launcher keeps one `ssh` per host. Its other end is a supervisor, which starts the ranks of its
host and ends them when the connection is gone.
"""
