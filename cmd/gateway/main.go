// Command gateway routes requests to a fleet of LLM servers by what their KV caches hold.
//
//	gateway --model Qwen/Qwen3-8B --replica http://10.0.0.1:8000 --replica http://10.0.0.2:8000
//	gateway --config gateway.yaml [--check-config]
//	gateway tokenize --model Qwen/Qwen3-8B < requests.jsonl
//	gateway version
//
// docs/configuration.md documents every key of the file; flags override it.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
)

// The exit codes.
const (
	exitOK    = 0
	exitError = 1 // it could not do its work
	exitUsage = 2 // it was called, or configured, wrongly
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is main without the process: the first signal ends ctx, the second one the process.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	command := ""
	if len(args) > 0 && args[0] != "" && args[0][0] != '-' {
		command, args = args[0], args[1:]
	}
	switch command {
	case "":
		return serve(ctx, args, stdout, stderr)
	case "tokenize":
		return tokenizeLines(ctx, args, stdin, stdout, stderr)
	case "version":
		fmt.Fprintln(stdout, "gateway", version())
		return exitOK
	}
	fmt.Fprintf(stderr, "gateway: there is no command %q: use tokenize or version, or flags alone to serve\n", command)
	return exitUsage
}

// version returns the module's version and revision, as the go command stamped them.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && (v == "" || v == "(devel)") {
			v = "devel-" + s.Value[:min(12, len(s.Value))]
		}
	}
	if v == "" {
		v = "devel"
	}
	return v
}
