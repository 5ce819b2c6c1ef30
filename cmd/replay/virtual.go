package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/mattn/go-isatty"
	"github.com/schollz/progressbar/v3"

	"prefixgate/internal/replay"
	"prefixgate/internal/route"
)

// cacheTokens is the default size of a replica's KV cache, in tokens: 2,000 blocks of 512.
const cacheTokens = 1_024_000

// runVirtual replays in virtual time.
func runVirtual(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	f := flag.NewFlagSet("replay", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprintf(stderr, "Usage: replay [flags]\n       replay live [flags]\n\nPolicies: %s; each takes options as in the configuration:\n"+
			"  -policy 'longest-prefix?longest_prefix.min_match=-1&longest_prefix.balance_abs=-1'\n\nFlags:\n", strings.Join(route.Names(), ", "))
		f.PrintDefaults()
	}
	var src source
	src.register(f)
	var o replay.Options
	register(f, &o)
	policies := f.String("policy", route.LeastTTFT, "comma-separated `policies`, or all")
	jsonOut := f.String("json", "", "`file` to write all figures to; - for standard output instead of the table")
	htmlOut := f.String("html", "", "`file` to write a page with plots to")
	progress := f.String("progress", "auto", "progress bar: auto (on a terminal), on or off")
	if err := parse(f, args); err != nil {
		return err
	}
	specs, err := parsePolicies(*policies)
	if err != nil {
		return &usageError{err}
	}
	if err := o.Validate(); err != nil {
		return &usageError{err}
	}
	w, err := src.load(ctx, o.Seed, o.Replicas, true)
	if err != nil {
		return err
	}
	if o.CacheBlocks == 0 {
		o.CacheBlocks = max(2, cacheTokens/w.blockTokens)
	}
	bar, err := newBar(*progress, stderr)
	if err != nil {
		return err
	}
	report := &replay.Report{Workload: w.name, Requests: w.requests, Setup: o.Settings(w.blockTokens)}
	for _, spec := range specs {
		load, err := w.open()
		if err != nil {
			return err
		}
		o.Progress = bar(spec.name, w.requests)
		r, err := replay.Run(ctx, load, spec.opts, o)
		if err != nil {
			return fmt.Errorf("policy %s: %w", spec.name, err)
		}
		r.Policy = spec.name
		report.Results = append(report.Results, r)
	}
	if *htmlOut != "" {
		if err := writeFile(*htmlOut, report.WriteHTML); err != nil {
			return err
		}
	}
	switch *jsonOut {
	case "-":
		return report.WriteJSON(stdout)
	case "":
	default:
		if err := writeFile(*jsonOut, report.WriteJSON); err != nil {
			return err
		}
	}
	return report.WriteTable(stdout)
}

// register adds the flags of the simulated world.
func register(f *flag.FlagSet, o *replay.Options) {
	f.IntVar(&o.Replicas, "replicas", 8, "number of replicas")
	f.Float64Var(&o.PrefillRate, "prefill-rate", 8000, "prompt tokens that a replica computes in a second, one prompt after another")
	f.Float64Var(&o.DecodeRate, "decode-rate", 0, "tokens per second of each answer (0: answers cost nothing)")
	f.IntVar(&o.CacheBlocks, "cache-blocks", 0, "KV cache of a replica in blocks (0: what holds 1,024,000 tokens)")
	f.IntVar(&o.Gateways, "gateways", 1, "number of gateways that share the requests")
	f.DurationVar(&o.Staleness, "staleness", 0, "how late a gateway learns what the others did")
	f.DurationVar(&o.ScrapeInterval, "scrape-interval", time.Second, "how often the replicas' own metrics are read")
	f.Func("ticks", "requests with equal timestamps: ordered, spread or together (default ordered)", func(s string) error {
		o.Ticks = replay.Ticks(s)
		return nil
	})
	f.BoolFunc("random-gateway", "give each request to a random gateway instead of by turns", func(string) error {
		o.Random = true
		return nil
	})
	f.BoolFunc("exact", "let the gateways know the caches exactly and at once, as with KV events", func(string) error {
		o.Exact = true
		return nil
	})
	f.Uint64Var(&o.Seed, "seed", 1, "what everything random follows from")
}

func parse(f *flag.FlagSet, args []string) error {
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return &usageError{err}
	}
	if f.NArg() > 0 {
		return usagef("unexpected argument %q", f.Arg(0))
	}
	return nil
}

// spec is one policy to run.
type spec struct {
	name string
	opts route.Options
}

// parsePolicies reads a list of policies with their options.
func parsePolicies(list string) ([]spec, error) {
	if list == "all" {
		list = strings.Join(route.Names(), ",")
	}
	var specs []spec
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		s := spec{name: name}
		policy, options, _ := strings.Cut(name, "?")
		doc, err := yamlOf(policy, options)
		if err != nil {
			return nil, fmt.Errorf("policy %s: %w", name, err)
		}
		if err := yaml.UnmarshalWithOptions([]byte(doc), &s.opts, yaml.Strict()); err != nil {
			return nil, fmt.Errorf("policy %s: %w", name, err)
		}
		if err := s.opts.Validate(); err != nil {
			return nil, fmt.Errorf("policy %s: %w", name, err)
		}
		specs = append(specs, s)
	}
	return specs, nil
}

// yamlOf turns key=value pairs whose keys are paths in route.Options into the document that the configuration would hold.
func yamlOf(policy, options string) (string, error) {
	tree := map[string]any{"policy": policy}
	if options == "" {
		options = "policy=" + policy
	}
	for pair := range strings.SplitSeq(options, "&") {
		path, value, ok := strings.Cut(pair, "=")
		if !ok {
			return "", fmt.Errorf("got %q, want key=value pairs joined by &", pair)
		}
		at := tree
		keys := strings.Split(path, ".")
		for _, k := range keys[:len(keys)-1] {
			next, ok := at[k].(map[string]any)
			if !ok {
				next = make(map[string]any)
				at[k] = next
			}
			at = next
		}
		var v any
		if err := yaml.Unmarshal([]byte(value), &v); err != nil {
			return "", fmt.Errorf("value of %s: %w", path, err)
		}
		at[keys[len(keys)-1]] = v
	}
	doc, err := yaml.Marshal(tree)
	if err != nil {
		return "", fmt.Errorf("encode options: %w", err)
	}
	return string(doc), nil
}

// newBar returns what makes a progress function for one run.
func newBar(mode string, stderr io.Writer) (func(name string, requests int) func(int), error) {
	show := mode == "on"
	switch mode {
	case "auto":
		file, ok := stderr.(*os.File)
		show = ok && isatty.IsTerminal(file.Fd())
	case "on", "off":
	default:
		return nil, usagef("-progress: got %q, want auto, on or off", mode)
	}
	return func(name string, requests int) func(int) {
		if !show {
			return nil
		}
		bar := progressbar.NewOptions(requests,
			progressbar.OptionSetWriter(stderr),
			progressbar.OptionSetDescription(name),
			progressbar.OptionSetWidth(30),
			progressbar.OptionThrottle(100*time.Millisecond),
			progressbar.OptionShowCount(),
			progressbar.OptionSetPredictTime(true),
			progressbar.OptionOnCompletion(func() { fmt.Fprintln(stderr) }),
			progressbar.OptionSetRenderBlankState(true),
		)
		return func(n int) { _ = bar.Set(n) } // A bar that cannot be drawn is no reason to stop.
	}, nil
}

// writeFile writes a whole file or leaves none.
func writeFile(name string, write func(io.Writer) error) error {
	tmp := name + ".tmp"
	f, err := os.Create(tmp)
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	err = write(f)
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(tmp, name)
	}
	if err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}
