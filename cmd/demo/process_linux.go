package main

import "syscall"

// processAttributes has the system end a program when the demonstration is killed and cannot do it any more.
func processAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
