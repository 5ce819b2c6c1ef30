package gateway

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// BenchmarkRequest measures one request through the whole gateway on a connection that stays, its prompt seen before, against
// a replica that answers at once: what is left is the gateway's work, HTTP on both sides included. The benchmark direct is
// the same without a gateway.
func BenchmarkRequest(b *testing.B) {
	e := startEngine(b, oneModel, answerOK)
	g := start(b, testConfig(e.URL))
	keep := &http.Transport{MaxIdleConnsPerHost: 8, DisableCompression: true}
	defer keep.CloseIdleConnections()
	httpClient := &http.Client{Transport: keep}
	for _, size := range []int{100, 1500, 12_000} {
		body := chat([]string{words(1, size)})
		for name, base := range map[string]string{"gateway": g.URL, "direct": e.URL} {
			b.Run(fmt.Sprintf("%dkB/%s", len(body)/1000, name), func(b *testing.B) {
				b.SetBytes(int64(len(body)))
				b.ReportAllocs()
				for b.Loop() {
					req, _ := http.NewRequest(http.MethodPost, base+"/v1/chat/completions", strings.NewReader(body))
					req.Header.Set("Content-Type", "application/json")
					resp, err := httpClient.Do(req)
					if err != nil {
						b.Fatal(err)
					}
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
					if resp.StatusCode != http.StatusOK {
						b.Fatalf("status %d", resp.StatusCode)
					}
				}
			})
		}
	}
}
