// Command replay runs a recorded or made-up workload over the project's own routing in virtual time, and compares policies.
//
//	replay -trace FILE -policy least-ttft,round-robin -replicas 8 -gateways 4 -staleness 100ms -html report.html
//	replay -workload agents -policy all
//	replay live -url http://127.0.0.1:8080 -trace FILE -speed 10
//
// It prints a table, and writes JSON and a page with plots on request. See docs/policies.md for the policies and docs/replay.md
// for what is simulated and what is not.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run returns the exit code: 0 for success, 1 for a failure, 2 for a wrong call.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	command := runVirtual
	if len(args) > 0 && args[0] == "live" {
		command, args = runLive, args[1:]
	}
	err := command(ctx, args, stdout, stderr)
	var wrong *usageError
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case errors.As(err, &wrong):
		fmt.Fprintf(stderr, "replay: %v\nreplay -help lists the flags\n", err)
		return 2
	default:
		fmt.Fprintf(stderr, "replay: %v\n", err)
		return 1
	}
}

// usageError is a call that cannot be meant.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Errorf(format, args...)}
}
