package proxy

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
)

// BenchmarkForward compares a request of 8 KB and its answer with the same through a bare httputil.ReverseProxy.
func BenchmarkForward(b *testing.B) {
	replica := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"choices":[]}`)
	}))
	defer replica.Close()
	target, err := url.Parse(replica.URL)
	if err != nil {
		b.Fatal(err)
	}
	p := New(Options{})
	defer p.Close()
	bare := &httputil.ReverseProxy{
		Transport: newTransport(Options{}.withDefaults()),
		Rewrite:   func(pr *httputil.ProxyRequest) { pr.SetURL(target) },
	}
	body := []byte(strings.Repeat("x", 8<<10))
	for name, handler := range map[string]http.HandlerFunc{
		"forward": func(w http.ResponseWriter, r *http.Request) {
			if o := p.Forward(w, r, Call{Body: body, Next: func(int) (Attempt, bool) { return Attempt{Addr: replica.URL}, true }}); o.Result != ResultOK {
				b.Errorf("outcome %+v", o)
			}
		},
		"bare": bare.ServeHTTP,
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(string(body)))
				w := httptest.NewRecorder()
				handler(w, r)
				if w.Code != http.StatusOK {
					b.Fatalf("status %d", w.Code)
				}
			}
		})
	}
}
