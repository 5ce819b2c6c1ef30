package replica

import (
	"bytes"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"prefixgate/internal/testenv"
)

func capture(tb testing.TB, name string) []byte {
	tb.Helper()
	text, err := os.ReadFile(testenv.Shared(tb, "vllm/"+name))
	if err != nil {
		tb.Fatal(err)
	}
	return text
}

// The captures are of a real vLLM 0.32; the library's parser is the reference.
func TestParseAgreesWithTheLibrary(t *testing.T) {
	for _, name := range []string{"metrics_idle.txt", "metrics_under_load.txt"} {
		text := capture(t, name)
		p := expfmt.NewTextParser(model.LegacyValidation)
		families, err := p.TextToMetricFamilies(bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		total := func(name string) float64 {
			fam := families[name]
			if fam == nil {
				t.Fatalf("%s is not in the capture", name)
			}
			v := 0.0
			for _, m := range fam.Metric {
				switch fam.GetType() {
				case dto.MetricType_COUNTER:
					v += m.Counter.GetValue()
				case dto.MetricType_HISTOGRAM:
					v += float64(m.Histogram.GetSampleCount())
				default:
					v += m.Gauge.GetValue()
				}
			}
			return v
		}
		got, missing := newExposition(MetricNames{}).parse(text)
		if len(missing) != 0 {
			t.Errorf("%s: missing %v, want none", name, missing)
		}
		for _, c := range []struct {
			name      string
			got, want float64
		}{
			{"running", got.running, total("vllm:num_requests_running")},
			{"waiting", got.waiting, total("vllm:num_requests_waiting")},
			{"kv usage", got.kvUsage, total("vllm:kv_cache_usage_perc")},
			{"prompt", got.prompt, total("vllm:prompt_tokens_total")},
			{"cached", got.cached, total("vllm:prompt_tokens_cached_total")},
			{"generated", got.generated, total("vllm:generation_tokens_total")},
			{"steps", got.steps, total("vllm:iteration_tokens_total")},
			{"start", got.start, total("process_start_time_seconds")},
			{"block size", float64(got.blockTokens), 32},
			{"blocks", float64(got.numBlocks), 65536},
		} {
			if c.got != c.want {
				t.Errorf("%s: %s = %v, want %v", name, c.name, c.got, c.want)
			}
		}
	}
}

func TestParseSumsEnginesAndKnowsOldNames(t *testing.T) {
	const text = `# TYPE x gauge
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 4 1796088447620
vllm:num_requests_waiting 5
vllm:gpu_cache_usage_perc{engine="0",x="}{\"\\"} 0.5
vllm:gpu_cache_usage_perc{engine="1"} 0.25
vllm:cache_config_info{a="x,block_size=\"9\"",block_size="16",num_gpu_blocks="100"} 1
vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1
vllm:cache_config_info{block_size="16",num_gpu_blocks="50"} 1
vllm:lora_requests_info{max_lora="2",running_lora_adapters="old",waiting_lora_adapters=""} 1.5e9
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a, b",waiting_lora_adapters="c"} 1.7e9
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters="x"} 1.6e9
vllm:prompt_tokens_total 10
vllm:prefix_cache_hits_total 4
vllm:generation_tokens_total NaN
vllm:num_requests_running{engine="broken
process_start_time_seconds 1e9
process_start_time_seconds_not 7
vllm:num_requests_waiting{engine="0"} none`
	s, missing := newExposition(MetricNames{}).parse([]byte(text))
	if s.running != 7 || s.waiting != 5 || s.kvUsage != 0.375 || s.blockTokens != 16 || s.numBlocks != 150 || s.cached != 4 || s.prompt != 10 || !math.IsNaN(s.generated) || s.start != 1e9 {
		t.Errorf("parse = %+v", s)
	}
	if !slices.Equal(s.adapters, []string{"a", "b"}) || !slices.Equal(s.waitingAdapters, []string{"c"}) || s.maxAdapters != 4 {
		t.Errorf("adapters = %v, waiting %v, max %d; want those of the latest value", s.adapters, s.waitingAdapters, s.maxAdapters)
	}
	if !slices.Equal(missing, []string{"vllm:generation_tokens_total"}) {
		t.Errorf("missing = %v, want the generation counter", missing)
	}
	s, missing = newExposition(MetricNames{Running: "sglang:num_running_reqs", KVUsage: "sglang:token_usage"}).parse([]byte("sglang:num_running_reqs 2\nsglang:token_usage 0.5\nvllm:num_requests_running 9\n"))
	if s.running != 2 || s.kvUsage != 0.5 || !math.IsNaN(s.waiting) || len(missing) != 5 {
		t.Errorf("parse with other names = %+v, missing %v", s, missing)
	}
}

func FuzzExposition(f *testing.F) {
	f.Add([]byte("vllm:lora_requests_info{max_lora=\"2\",running_lora_adapters=\"o\\\"ld\"} 1.5e9\nprocess_start_time_seconds 1\n"))
	e := newExposition(MetricNames{})
	f.Fuzz(func(t *testing.T, text []byte) {
		s, _ := e.parse(text)
		if s.numBlocks < 0 || s.blockTokens < 0 {
			t.Fatalf("parse = %+v", s)
		}
	})
}

func TestParseModelsKeepsMetadata(t *testing.T) {
	got, err := parseModels([]byte(`{"object":"list","data":[{"id":"m","x":{"y":1}},{"id":""},{"id":"l","parent":"m"}]}`))
	if err != nil || len(got) != 2 || string(got[0].Raw) != `{"id":"m","x":{"y":1}}` || got[1].Parent != "m" {
		t.Errorf("parseModels = %+v, %v", got, err)
	}
	for _, bad := range []string{"", "[]", `{"data":[7]}`, `{"data":"x"}`} {
		if got, err := parseModels([]byte(bad)); err == nil {
			t.Errorf("parseModels(%s) = %v, want an error", bad, got)
		}
	}
}

// The reason for a parser of our own: see exposition.
func BenchmarkExposition(b *testing.B) {
	text := capture(b, "metrics_under_load.txt")
	b.Run("own", func(b *testing.B) {
		b.SetBytes(int64(len(text)))
		b.ReportAllocs()
		e := newExposition(MetricNames{})
		for b.Loop() {
			if s, _ := e.parse(text); s.running != 16 {
				b.Fatal(s)
			}
		}
	})
	b.Run("expfmt", func(b *testing.B) {
		b.SetBytes(int64(len(text)))
		b.ReportAllocs()
		for b.Loop() {
			p := expfmt.NewTextParser(model.LegacyValidation)
			if _, err := p.TextToMetricFamilies(strings.NewReader(string(text))); err != nil {
				b.Fatal(err)
			}
		}
	})
}
