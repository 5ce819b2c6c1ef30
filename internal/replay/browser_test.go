package replay

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"prefixgate/internal/route"
	"prefixgate/internal/testenv"
)

// browser starts a headless Chromium and returns a context for chromedp; it ends with the test. listen gets its events.
func browser(t *testing.T, listen func(any)) context.Context {
	t.Helper()
	path := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if p, err := exec.LookPath(name); err == nil {
			path = p
			break
		}
	}
	if path == "" {
		testenv.Missing(t, "no Chromium: install the package chromium")
	}
	opts := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path),
		chromedp.NoSandbox, // CI runs as root in a container; the only page opened is our own.
		chromedp.DisableGPU,
		chromedp.UserDataDir(t.TempDir()),
		chromedp.Flag("disable-quic", true),
		chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true),
		chromedp.Flag("disable-sync", true),
		chromedp.WindowSize(1280, 1700),
	)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewExecAllocator(ctx, opts...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx, chromedp.WithListener(listen))
	t.Cleanup(cancel)
	return ctx
}

// sampleReport runs three policies over a made-up workload with a refused request's worth of trouble in its names.
func sampleReport(t *testing.T) *Report {
	t.Helper()
	opts := Options{Replicas: 4, CacheBlocks: 4000, Gateways: 2, Staleness: 50 * time.Millisecond, Seed: 1}
	report := &Report{Workload: "chat </script><b>& co", Requests: 3000, Setup: opts.Settings(64)}
	for _, name := range []string{route.LeastTTFT, route.RoundRobin, route.Weighted} {
		load, err := Synthetic{Kind: "chat", Requests: 3000, Seed: 1}.Open(4)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Run(t.Context(), load, route.Options{Policy: name}, opts)
		if err != nil {
			t.Fatal(err)
		}
		report.Results = append(report.Results, r)
	}
	return report
}

// The page is served over real HTTP and opened in a real browser, where every plot must have lines with many points inside its
// frame, the legend must work, and nothing may be logged as an error or fetched from elsewhere.
func TestReportDrawsItsPlotsInABrowser(t *testing.T) {
	report := sampleReport(t)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /report.html", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		if err := report.WriteHTML(w); err != nil {
			t.Error(err)
		}
	})
	server := httptest.NewServer(mux)
	defer server.Close()

	var mu sync.Mutex // Guards the lists below: events come on another goroutine.
	var complaints, fetched []string
	ctx := browser(t, func(ev any) {
		mu.Lock()
		defer mu.Unlock()
		switch ev := ev.(type) {
		case *runtime.EventExceptionThrown:
			complaints = append(complaints, ev.ExceptionDetails.Text)
		case *runtime.EventConsoleAPICalled:
			complaints = append(complaints, fmt.Sprintf("console.%s", ev.Type))
		case *log.EventEntryAdded:
			complaints = append(complaints, ev.Entry.Text)
		case *network.EventRequestWillBeSent:
			if !strings.HasPrefix(ev.Request.URL, "data:") {
				fetched = append(fetched, ev.Request.URL)
			}
		}
	})
	const count = `document.querySelectorAll("#cdf path").length`
	// For each plot with lines: how many lines, the fewest points of one, and whether all lie in the frame.
	const check = `["cdf","ttft","hits","load","work"].map(id => {
		const svg = document.querySelector("#" + id + " svg"), box = svg.getBoundingClientRect();
		const paths = [...svg.querySelectorAll("path")];
		const points = Math.min(...paths.map(p => p.getAttribute("d").split("L").length));
		const inside = paths.every(p => { const b = p.getBoundingClientRect(); return b.left >= box.left && b.right <= box.right + 1 && b.top >= box.top - 1 && b.bottom <= box.bottom + 1 && b.width > 100; });
		return id + " lines=" + paths.length + " points=" + (points >= 4 ? "enough" : points) + " inside=" + inside + " bad=" + /NaN|Infinity|undefined/.test(svg.outerHTML);
	}).join("; ")`
	do := func(steps ...chromedp.Action[chromedp.Void]) {
		t.Helper()
		if err := chromedp.Do(ctx, steps...); err != nil {
			t.Fatal(err)
		}
	}
	do(
		func(ctx context.Context, target *chromedp.Target) (chromedp.Void, error) {
			_, err := cdp.Call(ctx, target, network.Enable, network.EnableParams{})
			return chromedp.Void{}, err
		},
		func(ctx context.Context, target *chromedp.Target) (chromedp.Void, error) {
			_, err := cdp.Call(ctx, target, log.Enable, cdp.Empty{})
			return chromedp.Void{}, err
		},
		chromedp.Navigate(server.URL+"/report.html"),
		chromedp.WaitReady(chromedp.CSS(`html[data-ready="true"]`)),
	)
	title := eval[string](t, ctx, `document.querySelector("h1").textContent`)
	rows := eval[int](t, ctx, `document.querySelectorAll("#summary tbody tr").length`)
	legend := eval[int](t, ctx, `document.querySelectorAll("#legend button").length`)
	worst := eval[string](t, ctx, check)
	before := eval[int](t, ctx, count)
	shot, err := chromedp.Run(ctx, chromedp.FullScreenshot(90))
	if err != nil {
		t.Fatal(err)
	}
	do(chromedp.Click(chromedp.CSS("#legend button:nth-child(2)")))
	after := eval[int](t, ctx, count)
	if path := os.Getenv("PREFIXGATE_SCREENSHOT"); path != "" {
		if err := os.WriteFile(path, shot, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if len(complaints) > 0 {
		t.Errorf("the browser complains: %q", complaints)
	}
	if len(fetched) != 1 || fetched[0] != server.URL+"/report.html" {
		t.Errorf("fetched %q, want the page alone", fetched)
	}
	if title != report.Workload {
		t.Errorf("title = %q, want %q", title, report.Workload)
	}
	if rows != 3 || legend != 3 || before != 3 || after != 2 {
		t.Errorf("got %d rows, %d buttons, %d lines and %d after a click on one, want 3, 3, 3, 2", rows, legend, before, after)
	}
	want := "cdf lines=3 points=enough inside=true bad=false; ttft lines=3 points=enough inside=true bad=false; " +
		"hits lines=3 points=enough inside=true bad=false; load lines=4 points=enough inside=true bad=false; " +
		"work lines=3 points=enough inside=true bad=false"
	if worst != want {
		t.Errorf("plots: %s\nwant:  %s", worst, want)
	}
}

// eval runs an expression in the page.
func eval[T any](t *testing.T, ctx context.Context, expression string) T { //nolint:revive // t first, as in all helpers.
	t.Helper()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		t.Fatal(err)
	}
	return v
}
