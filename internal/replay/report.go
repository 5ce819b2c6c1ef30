package replay

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// Report are the results of all policies over one workload.
type Report struct {
	// Workload says what was run, for people.
	Workload string `json:"workload"`
	// Requests is how many requests the workload has.
	Requests int `json:"requests"`
	// Setup are the options, in the order they are shown.
	Setup []Setting `json:"setup"`
	// Results are in the order they were asked for.
	Results []*Result `json:"results"`
}

// Setting is one option as shown in a report.
type Setting struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// Settings returns the options for a report, in a fixed order.
func (o Options) Settings(blockTokens int) []Setting {
	o = o.withDefaults()
	decode := fmt.Sprintf("%g tokens/s", o.DecodeRate)
	if o.DecodeRate > 1e12 {
		decode = "not simulated"
	}
	assign := "take turns"
	if o.Random {
		assign = "at random"
	}
	knowledge := "index"
	if o.Exact {
		knowledge = "exact"
	}
	return []Setting{
		{"replicas", fmt.Sprint(o.Replicas)},
		{"prefill rate", fmt.Sprintf("%g tokens/s", o.PrefillRate)},
		{"answers", decode},
		{"KV cache", fmt.Sprintf("%d blocks of %d tokens", o.CacheBlocks, blockTokens)},
		{"gateways", fmt.Sprint(o.Gateways)},
		{"gateways get requests", assign},
		{"staleness", o.Staleness.String()},
		{"knowledge of caches", knowledge},
		{"equal timestamps", string(o.Ticks)},
		{"scrape interval", o.ScrapeInterval.String()},
		{"seed", fmt.Sprint(o.Seed)},
	}
}

// WriteJSON writes the report. Two runs with the same options write the same bytes.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	if err := e.Encode(r); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

// WriteTable writes the main figures for a terminal.
func (r *Report) WriteTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "policy\tTTFT mean\tp50\tp90\tp99\tblock hits\ttoken hits\trequests max/mean\twork max/mean\tpredicted exactly\tdecision\trun\t")
	for _, x := range r.Results {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%.3f\t%.3f\t%.2f\t%.2f\t%.1f %%\t%s\t%s\t\n", x.Policy,
			seconds(x.TTFT.Mean), seconds(x.TTFT.P50), seconds(x.TTFT.P90), seconds(x.TTFT.P99),
			x.BlockHitRate, x.TokenHitRate, x.RequestImbalance, x.WorkImbalance, 100*x.MatchAgreement,
			x.Timing.Decision.Round(100*time.Nanosecond), x.Timing.Wall.Round(time.Millisecond))
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("write table: %w", err)
	}
	for _, x := range r.Results {
		if x.Refused > 0 {
			if _, err := fmt.Fprintf(w, "%s: %d requests were longer than the whole KV cache of a replica\n", x.Policy, x.Refused); err != nil {
				return fmt.Errorf("write table: %w", err)
			}
		}
	}
	return nil
}

// seconds formats a time to three digits.
func seconds(s float64) string {
	switch {
	case s >= 100:
		return fmt.Sprintf("%.0f s", s)
	case s >= 10:
		return fmt.Sprintf("%.1f s", s)
	case s >= 1:
		return fmt.Sprintf("%.2f s", s)
	}
	return fmt.Sprintf("%.0f ms", s*1000)
}

//go:embed report.html
var reportHTML string

// WriteHTML writes the report as one page with plots. It needs nothing from the network: style, script and data are inside.
func (r *Report) WriteHTML(w io.Writer) error {
	data, err := json.Marshal(r) // Escapes <, > and &, so it cannot end the script element it stands in.
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	page, err := template.New("report").Parse(reportHTML)
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	err = page.Execute(w, struct {
		Report *Report
		Data   template.JS
		Title  string
	}{r, template.JS(data), strings.TrimSpace(r.Workload)}) //nolint:gosec // It was marshaled right above.
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}
