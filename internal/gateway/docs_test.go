package gateway

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"prefixgate/internal/testenv"

	"github.com/prometheus/client_golang/prometheus"
)

// describing is a Registerer that notes what is registered.
type describing struct {
	prometheus.Registerer
	descs *[]string
}

func (d describing) Register(c prometheus.Collector) error {
	d.note(c)
	return d.Registerer.Register(c)
}

func (d describing) MustRegister(cs ...prometheus.Collector) {
	for _, c := range cs {
		d.note(c)
	}
	d.Registerer.MustRegister(cs...)
}

func (d describing) note(c prometheus.Collector) {
	ch := make(chan *prometheus.Desc)
	go func() {
		c.Describe(ch)
		close(ch)
	}()
	for desc := range ch {
		*d.descs = append(*d.descs, desc.String())
	}
}

var descPattern = regexp.MustCompile(`^Desc\{fqName: "([^"]*)", help: "(.*)", unit: "[^"]*", constLabels: \{(.*)\}, (?:variableLabels: \{([^}]*)\})?`)

// Every metric is in docs/metrics.md with its labels, and nothing is there that does not exist.
func TestMetricsAreDocumented(t *testing.T) {
	var descs []string
	c := testConfig(startReplica(t, nil).URL())
	c.Redis.URL = "redis://127.0.0.1:1" // the metrics of a shared index are there, whether Redis is or not
	g := startWith(t, c, func(o *Options) {
		o.wrap = func(r prometheus.Registerer) prometheus.Registerer { return describing{r, &descs} }
	})
	g.awaitReady()
	g.ok("/v1/completions", completion("a"))
	g.end()

	exported := map[string]string{}
	for _, d := range descs {
		m := descPattern.FindStringSubmatch(d)
		if m == nil {
			t.Fatalf("description %s has another form than expected", d)
		}
		if strings.HasPrefix(m[1], "prefixgate_") {
			labels := strings.FieldsFunc(m[4], func(r rune) bool { return r == ',' })
			for label := range strings.SplitSeq(m[3], ",") {
				if name, _, ok := strings.Cut(label, "="); ok {
					labels = append(labels, name)
				}
			}
			slices.Sort(labels)
			exported[m[1]] = strings.Join(labels, ", ")
			if help := m[2]; !strings.HasSuffix(help, ".") {
				t.Errorf("the help of %s is %q, want a sentence", m[1], help)
			}
		}
	}
	doc, err := os.ReadFile(filepath.Join(testenv.Root(), "docs", "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]string{}
	row := regexp.MustCompile("(?m)^\\| `(prefixgate_[a-z0-9_]+)` \\| ([^|]*) \\| ([^|]*) \\| (.*) \\|$")
	for _, m := range row.FindAllStringSubmatch(string(doc), -1) {
		if _, twice := documented[m[1]]; twice {
			t.Errorf("docs/metrics.md has %s twice", m[1])
		}
		labels := regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(m[3], -1)
		var names []string
		for _, l := range labels {
			names = append(names, l[1])
		}
		slices.Sort(names)
		documented[m[1]] = strings.Join(names, ", ")
		if strings.TrimSpace(m[4]) == "" {
			t.Errorf("docs/metrics.md says nothing about %s", m[1])
		}
	}
	for name, labels := range exported {
		if got, ok := documented[name]; !ok {
			t.Errorf("docs/metrics.md lacks %s (labels %s)", name, labels)
		} else if got != labels {
			t.Errorf("docs/metrics.md gives %s the labels %q, want %q", name, got, labels)
		}
	}
	for name := range documented {
		if _, ok := exported[name]; !ok {
			t.Errorf("docs/metrics.md has %s, which is not exported", name)
		}
	}
	if len(exported) < 50 {
		t.Errorf("found %d metrics, want all of them", len(exported))
	}
}
