package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"slices"
	"text/tabwriter"
	"time"

	"prefixgate/internal/replay"
	"prefixgate/internal/route"
)

// comparison is what live writes as JSON.
type comparison struct {
	Workload  string             `json:"workload"`
	Requests  int                `json:"requests"`
	Setup     []replay.Setting   `json:"setup"`
	Measured  *replay.LiveResult `json:"measured"`
	Simulated *replay.Result     `json:"simulated,omitempty"`
}

// runLive sends a workload to a running gateway and compares what it predicted, and what the simulation says, with what happened.
func runLive(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	f := flag.NewFlagSet("replay live", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprintf(stderr, "Usage: replay live -url URL -trace FILE [flags]\n\n"+
			"Sends a workload to a running gateway. The flags of the simulated world should describe the real one;\nREPLAY_TOKEN in the environment is sent as a bearer token.\n\nFlags:\n")
		f.PrintDefaults()
	}
	var src source
	src.register(f)
	var o replay.Options
	register(f, &o)
	live := replay.LiveOptions{Token: os.Getenv("REPLAY_TOKEN")}
	f.StringVar(&live.URL, "url", "", "the gateway's base `URL`")
	f.StringVar(&live.Model, "served-model", "", "model name in the requests (default: as recorded, or none)")
	f.IntVar(&live.Vocabulary, "vocabulary", 0, "token ids that made-up prompts draw from (default 30000)")
	f.IntVar(&live.MaxOutput, "max-output", 0, "cut answers to so many tokens (0: as in the workload)")
	policy := f.String("policy", route.LeastTTFT, "the gateway's policy, for the simulation")
	simulate := f.Bool("simulate", true, "also run the workload in virtual time")
	jsonOut := f.String("json", "", "`file` to write all figures to; - for standard output instead of the table")
	progress := f.String("progress", "auto", "progress bar: auto (on a terminal), on or off")
	if err := parse(f, args); err != nil {
		return err
	}
	if u, err := url.Parse(live.URL); err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return usagef("-url: want the gateway's base URL, such as http://127.0.0.1:8080")
	}
	specs, err := parsePolicies(*policy)
	if err != nil {
		return &usageError{err}
	}
	if err := o.Validate(); err != nil {
		return &usageError{err}
	}
	bar, err := newBar(*progress, stderr)
	if err != nil {
		return err
	}
	w, err := src.load(ctx, o.Seed, o.Replicas, *simulate)
	if err != nil {
		return err
	}
	if o.CacheBlocks == 0 {
		o.CacheBlocks = max(2, cacheTokens/w.blockTokens)
	}
	o.Ticks = replay.TicksSpread // As they are sent.
	c := comparison{Workload: w.name, Requests: w.requests, Setup: o.Settings(w.blockTokens)}
	load, err := w.open()
	if err != nil {
		return err
	}
	live.Progress = bar("live", w.requests)
	measured, liveErr := replay.Live(ctx, load, live)
	if measured == nil {
		return liveErr
	}
	c.Measured = measured
	if *simulate && liveErr == nil {
		if load, err = w.open(); err != nil {
			return err
		}
		if c.Simulated, err = replay.Run(ctx, load, specs[0].opts, o); err != nil {
			return err
		}
	}
	if *jsonOut != "" {
		write := func(out io.Writer) error {
			e := json.NewEncoder(out)
			e.SetIndent("", " ")
			return e.Encode(c)
		}
		if *jsonOut == "-" {
			err = write(stdout)
		} else {
			err = writeFile(*jsonOut, write)
		}
		if err != nil {
			return err
		}
	}
	if *jsonOut != "-" {
		if err := c.writeTable(stdout); err != nil {
			return err
		}
	}
	switch {
	case liveErr != nil:
		return liveErr
	case measured.Failed == measured.Requests:
		return fmt.Errorf("no request was answered: %v", measured.Failures)
	}
	return nil
}

func (c *comparison) writeTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\trequests\tfailed\tTTFT mean\tp50\tp90\tp99\ttoken hits\tpredicted exactly\ttoo many\ttoo few\t")
	row := func(name string, requests, failed int, d replay.Distribution, hits, agreed, over, under float64) {
		fmt.Fprintf(t, "%s\t%d\t%d\t%s\t%s\t%s\t%s\t%.3f\t%.1f %%\t%.2f %%\t%.2f %%\t\n", name, requests, failed,
			duration(d.Mean), duration(d.P50), duration(d.P90), duration(d.P99), hits, 100*agreed, 100*over, 100*under)
	}
	m := c.Measured
	row("measured", m.Requests, m.Failed, m.TTFT, m.TokenHitRate, m.MatchAgreement, m.OverPredicted, m.UnderPredicted)
	if s := c.Simulated; s != nil {
		row("simulated", s.Requests, s.Refused, s.TTFT, s.TokenHitRate, s.MatchAgreement, s.OverPredicted, s.UnderPredicted)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("write table: %w", err)
	}
	for _, part := range []struct {
		name   string
		counts map[string]int
	}{{"failures", m.Failures}, {"answers by replica", m.Replicas}, {"decisions by reason", m.Reasons}} {
		if len(part.counts) == 0 {
			continue
		}
		fmt.Fprintf(w, "%s:", part.name)
		for _, k := range slices.Sorted(maps.Keys(part.counts)) {
			fmt.Fprintf(w, " %s=%d", k, part.counts[k])
		}
		fmt.Fprintln(w)
	}
	if m.Predicted == 0 {
		fmt.Fprintln(w, "no predictions: the gateway shows its decisions only where debug headers are allowed (--debug-headers)")
	}
	if m.Late > 0.1 {
		fmt.Fprintf(w, "requests were sent up to %s late: this machine is too slow for the workload at this speed\n", duration(m.Late))
	}
	return nil
}

// duration formats seconds.
func duration(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(100 * time.Microsecond).String()
}
