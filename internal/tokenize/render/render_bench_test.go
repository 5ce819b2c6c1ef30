package render

import (
	"fmt"
	"testing"
)

func BenchmarkRender(b *testing.B) {
	for _, model := range []string{"qwen3", "llama3_1", "deepseek_v3"} {
		tmpl := openModel(b, model)
		for _, c := range []struct {
			name        string
			turns, size int
		}{{"200B", 1, 100}, {"8KB", 8, 1000}, {"64KB", 32, 2000}, {"400KB", 100, 4000}, {"400KB-1000turns", 1000, 350}} {
			in := conversation(c.turns, c.size)
			b.Run(fmt.Sprintf("%s/%s", model, c.name), func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(len(in.Messages)))
				for b.Loop() {
					if _, err := tmpl.Render(in); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
