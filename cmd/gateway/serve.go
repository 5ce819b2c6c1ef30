package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"prefixgate/internal/config"
	"prefixgate/internal/gateway"
	"prefixgate/internal/index"
	"prefixgate/internal/replica"
	"prefixgate/internal/route"
	"prefixgate/internal/tokenize"
)

// serve runs the gateway until ctx is done.
func serve(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	cfg, check, err := configure(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	if err == nil {
		err = cfg.Validate()
	}
	if err != nil {
		complain(stderr, err)
		return exitUsage
	}
	if check {
		fmt.Fprintln(stdout, "the configuration is valid")
		return exitOK
	}
	log, access := loggers(cfg.Log, stderr)
	index.SetClientLogger(log) // the library knows one logger for the whole process
	g, err := gateway.New(gateway.Options{Config: cfg, Log: log, Access: access, Version: version()})
	if err != nil {
		complain(stderr, err)
		return exitError
	}
	if err := g.Run(ctx); err != nil {
		complain(stderr, err)
		return exitError
	}
	return exitOK
}

// complain writes an error, one line for each of those joined in it.
func complain(w io.Writer, err error) {
	for line := range strings.SplitSeq(err.Error(), "\n") {
		fmt.Fprintln(w, "gateway:", line)
	}
}

// configure makes the configuration from the file, if there is one, and the flags, which override it.
func configure(args []string, stderr io.Writer) (cfg *config.Config, check bool, err error) {
	flags := flag.NewFlagSet("gateway", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprint(stderr, "gateway routes requests to a fleet of LLM servers by what their KV caches hold.\n\n"+
			"  gateway --model Qwen/Qwen3-8B --replica http://10.0.0.1:8000 --replica http://10.0.0.2:8000\n"+
			"  gateway --config gateway.yaml\n"+
			"  gateway tokenize --model Qwen/Qwen3-8B < requests.jsonl\n"+
			"  gateway version\n\n"+
			"Flags override the file; docs/configuration.md documents each of its keys.\n\n")
		flags.PrintDefaults()
	}
	file := flags.String("config", "", "YAML `file` with the configuration")
	checkConfig := flags.Bool("check-config", false, "check the configuration and end")
	var models, replicas list
	flags.Var(&models, "model", "folder, tokenizer.json or hub name of the `model`; may be repeated")
	flags.Var(&replicas, "replica", "base `URL` of a replica; may be repeated")
	listen := flags.String("listen", "", "`address` for clients (default :8080)")
	admin := flags.String("admin-listen", "", "another `address` for metrics and health")
	redis := flags.String("redis", "", "`URL` of the Redis that gateways share; without it the index is in the process")
	policy := flags.String("policy", "", "routing `policy`: "+strings.Join(route.Names(), ", ")+" (default "+route.LeastTTFT+")")
	template := flags.String("chat-template", "", "`file` with the model's chat template, instead of its own")
	debugHeaders := flags.Bool("debug-headers", false, "show decisions to clients that send x-prefixgate-debug: 1")
	level := flags.String("log-level", "", "debug, info, warn or error (default info)")
	format := flags.String("log-format", "", "json or text (default json)")
	if err := flags.Parse(args); err != nil {
		return nil, false, err
	}
	if flags.NArg() > 0 {
		return nil, false, fmt.Errorf("unexpected argument %q: replicas and models follow --replica and --model", flags.Arg(0))
	}
	cfg = &config.Config{}
	if *file != "" {
		if cfg, err = config.Load(*file); err != nil {
			return nil, false, err
		}
	}
	override(&cfg.Server.Listen, *listen)
	override(&cfg.Server.AdminListen, *admin)
	override(&cfg.Route.Policy, *policy)
	override(&cfg.Log.Level, *level)
	override(&cfg.Log.Format, *format)
	cfg.Server.DebugHeaders = cfg.Server.DebugHeaders || *debugHeaders
	if *redis != "" {
		cfg.Redis = config.Redis{URL: config.Secret(*redis)}
	}
	if len(models) > 0 {
		cfg.Models = nil
		for _, m := range models {
			cfg.Models = append(cfg.Models, config.Model{Tokenizer: tokenize.Options{Model: m}})
		}
	}
	if *template != "" {
		if len(cfg.Models) != 1 {
			return nil, false, fmt.Errorf("--chat-template is for one model, but there are %d: set models[].tokenizer.chat_template in the file", len(cfg.Models))
		}
		cfg.Models[0].Tokenizer.ChatTemplate = *template
	}
	if len(replicas) > 0 {
		cfg.Fleet.Replicas = nil
		for _, url := range replicas {
			cfg.Fleet.Replicas = append(cfg.Fleet.Replicas, replica.Target{URL: url})
		}
	}
	return cfg, *checkConfig, nil
}

func override(v *string, with string) {
	if with != "" {
		*v = with
	}
}

// list is a flag that may be repeated.
type list []string

// String joins the values.
func (l *list) String() string { return strings.Join(*l, ", ") }

// Set adds a value.
func (l *list) Set(v string) error {
	if v == "" {
		return errors.New("it is empty")
	}
	*l = append(*l, v)
	return nil
}

// loggers returns the gateway's log and, unless switched off, the one of the access lines, which come at every level.
func loggers(opts config.Log, w io.Writer) (log, access *slog.Logger) {
	level := map[string]slog.Level{"debug": slog.LevelDebug, "warn": slog.LevelWarn, "error": slog.LevelError}[opts.Level]
	handler := func(level slog.Level) slog.Handler {
		o := &slog.HandlerOptions{Level: level}
		if opts.Format == "text" {
			return slog.NewTextHandler(w, o)
		}
		return slog.NewJSONHandler(w, o)
	}
	log = slog.New(handler(level))
	if opts.Access == nil || *opts.Access {
		access = slog.New(handler(slog.LevelInfo))
	}
	return log, access
}
