package tokenize

import (
	"os"
	"path/filepath"
	"testing"

	"prefixgate/internal/testenv"
)

// publicTokenizers returns the paths of every real tokenizer that tests may use, by name.
func publicTokenizers(tb testing.TB) map[string]string {
	tb.Helper()
	paths := map[string]string{"prefixgate-demo": filepath.Join(testenv.Root(), "models", "prefixgate-demo", fileTokenizer)}
	for _, name := range []string{"qwen3", "llama3_1", "gptoss", "deepseek_v3", "gemma3"} {
		paths[name] = filepath.Join(testenv.Tokenizer(tb, name), fileTokenizer)
	}
	for _, name := range []string{"Meta-Llama-3-8B-Instruct", "cohere-tokenizer", "bert-base-uncased"} {
		paths[name] = testenv.GoModuleTokenizer(tb, name+".json")
	}
	return paths
}

func TestChoice(t *testing.T) {
	for name, path := range publicTokenizers(t) {
		t.Run(name, func(t *testing.T) {
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			v, err := readVocabulary(data)
			if err != nil {
				t.Fatal(err)
			}
			var special []string
			for _, a := range v.AddedTokens {
				special = append(special, a.Content)
			}
			e, chosen, why, err := chooseEncoder(data, nil, special, EncoderAuto)
			if err != nil {
				t.Fatal(err)
			}
			defer e.close()
			t.Log(chosen, why)
		})
	}
}
